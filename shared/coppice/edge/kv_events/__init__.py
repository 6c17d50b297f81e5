"""KV events of the field, as vLLM and SGLang publish them: payloads, and the ZMQ frames around them."""
