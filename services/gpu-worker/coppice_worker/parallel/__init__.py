"""One model over several processes, the ranks of a worker (tensor parallelism).

    rank 0: the worker that everybody knows            rank 1, 2, ...: processes that rank 0 starts
    sessions, core, step thread                        a loop that takes commands
    TensorParallelExecutor -- commands, one socket each --> TorchExecutor on their share
            TorchExecutor  <------- sums of hidden states, columns of logits ------->

Each rank has a share of the heads, of the MLP and of the vocabulary, and the blocks of its own KV heads. Block ids are
the same everywhere, so handles, plans and the cache service know nothing of ranks. Every rank computes the same batches
in the same order and draws the same tokens; nothing but sums and logits ever comes back.
"""
