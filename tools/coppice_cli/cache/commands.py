"""`coppice cache ...`: look into a running cache service, and tell it what to forget or to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.errors import EXIT_FAILURE, EXIT_OK, UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_cli.cache.client import DEFAULT_URL, CacheClient
from coppice_cli.tls_options import TlsCa, TlsCert, TlsKey, files_of
from coppice_cli.variables import Command

Url = Annotated[
    str,
    typer.Option(envvar="COPPICE_ADMIN_URL", help="Admin REST of the cache; `coppice up` prints it as cache admin."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")]
Domain = Annotated[str, typer.Argument(help="Such as tenant/default; `coppice cache stats` lists those in use.")]
Namespace = Annotated[str, typer.Option(help="Hexadecimal, as tree and explain --json show it.")]
Tokens = Annotated[str, typer.Option(help="The prompt as tokens: 1,2,3 or @FILE.")]
Text = Annotated[str, typer.Option(help="The prompt as text, for the tokenizer of --model.")]
Messages = Annotated[
    Path | None,
    typer.Option(help="A chat, for the chat template of --model: a file of JSON, a list of messages or a whole body."),
]
Model = Annotated[
    str, typer.Option(help="Checkpoint folder or hub id, for --text and --messages. Default: the demo model.")
]


def add_to(cache: typer.Typer) -> None:
    """Hang the commands up under `coppice cache`."""
    cache.callback()(tls_options)
    for command in (stats, statement, tree, explain, audit, flush, pin, unpin, pins):
        cache.command(cls=Command)(command)


def tls_options(context: typer.Context, cert: TlsCert = None, key: TlsKey = None, ca: TlsCa = None) -> None:
    """Look into a running cache service. With TLS, give the certificate of an operator before the command."""
    context.obj = files_of(cert, key, ca)


def _client(context: typer.Context, url: str) -> CacheClient:
    files = context.obj
    return CacheClient(url, None if files is None else Credentials(files, Role.OPERATOR))


def stats(context: typer.Context, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Blocks, leases and hits, per worker and domain."""
    from coppice_cli.cache import views as cache_views

    cache_views.show_stats(_client(context, url).stats(), as_json=json)


def statement(
    context: typer.Context,
    worker: Annotated[str, typer.Option(help="Only what this worker has now.")] = "",
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Blocks times how long each domain held, borrowed and lent them; with those that were free they are the pools."""
    from coppice_cli.cache import views as cache_views

    cache_views.show_statement(_client(context, url).statement(worker), as_json=json)


def tree(
    context: typer.Context,
    domain: Domain,
    worker: Annotated[str, typer.Option(help="Only this worker's trees.")] = "",
    depth: Annotated[int, typer.Option(min=0, max=64, help="Nodes below each root.")] = 8,
    limit: Annotated[int, typer.Option(min=1, max=4096, help="Nodes in all; the rest is in the next page.")] = 64,
    page_token: Annotated[str, typer.Option(help="Go on behind an earlier page; it printed its token.")] = "",
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """The radix trees of a domain."""
    from coppice_cli.cache import views as cache_views

    found = _client(context, url).tree(domain, worker_id=worker, max_depth=depth, limit=limit, page_token=page_token)
    cache_views.show_tree(found, as_json=json)


def explain(
    context: typer.Context,
    domain: Domain,
    tokens: Tokens = "",
    text: Text = "",
    messages: Messages = None,
    model: Model = "",
    namespace: Namespace = "",
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """What a prompt would find on each worker, why not more, and who holds it."""
    from coppice_cli.cache import views as cache_views
    from coppice_cli.cache.token_lists import read_tokens

    prompt = read_tokens(tokens, text, model, messages)
    cache_views.show_explanations(_client(context, url).explain(domain, prompt, namespace), as_json=json)


def audit(context: typer.Context, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Check every invariant, in slices beside the work. Exit code 1 when one is broken."""
    from coppice_cli.cache import views as cache_views

    found = _client(context, url).audit()
    cache_views.show_audit(found, as_json=json)
    raise typer.Exit(EXIT_OK if found["holds"] else EXIT_FAILURE)


def flush(
    context: typer.Context,
    domain: Annotated[str, typer.Argument(help="Only this domain. Without any limit, everything.")] = "",
    namespace: Namespace = "",
    tokens: Annotated[str, typer.Option(help="Only what follows this prefix of tokens: 1,2,3 or @FILE.")] = "",
    text: Annotated[str, typer.Option(help="The same as text.")] = "",
    model: Model = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before everything is forgotten.")] = False,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Forget what is cached: nobody finds it from now on. Requests that read it go on."""
    from coppice_cli.cache import views as cache_views
    from coppice_cli.cache.token_lists import read_tokens

    client = _client(context, url)
    what: dict[str, object] = {}
    if tokens or text:
        if not domain:
            raise UsageError("a prefix lies in a domain", hint="coppice cache flush DOMAIN --tokens 1,2,3")
        what["tokens"] = prompt = read_tokens(tokens, text, model)
        namespace = namespace or _only_namespace(client, domain, prompt)
    if domain:
        what["domain"] = domain
    if namespace:
        what["namespace"] = namespace
    if not what:
        _confirm(yes)
        what["everything"] = True
    cache_views.show_flushed(client.invalidate(what), as_json=json)


def pin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What to call the pin.")],
    domain: Domain,
    tokens: Tokens = "",
    text: Text = "",
    messages: Messages = None,
    model: Model = "",
    namespace: Namespace = "",
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Keep a prefix cached for ever, such as a system prompt; what of it is not cached yet is kept once it is.

    Of --messages all that chats which begin with them have in common is kept.
    """
    from coppice_cli.cache import views as cache_views
    from coppice_cli.cache.token_lists import read_tokens

    client, prompt = _client(context, url), read_tokens(tokens, text, model, messages, whole_chat=False)
    namespace = namespace or _only_namespace(client, domain, prompt)
    cache_views.show_pinned(client.pin(name, domain, namespace, prompt), len(prompt), as_json=json)


def unpin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of a pin, as `coppice cache pins` lists it.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Let a pinned prefix go."""
    from coppice_cli.cache import views as cache_views

    cache_views.show_unpinned(_client(context, url).unpin(name), as_json=json)


def pins(context: typer.Context, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """All pins and what they hold."""
    from coppice_cli.cache import views as cache_views

    cache_views.show_pins(_client(context, url).pins(), as_json=json)


def _only_namespace(client: CacheClient, domain: str, prompt: list[int]) -> str:
    """Where one model is served there is one namespace, and nobody has to name it."""
    found = sorted({entry["namespace"] for entry in client.explain(domain, prompt, "")["workers"]})
    if not found:
        raise UsageError("no worker is registered, so the namespace is not known", hint="give --namespace")
    if len(found) > 1:
        raise UsageError(f"{domain!r} has {len(found)} namespaces", hint="give --namespace, one of " + ", ".join(found))
    return str(found[0])


def _confirm(yes: bool) -> None:
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("this forgets everything that is cached, for all tenants", hint="say --yes, or name a domain")
    if not typer.confirm("Forget everything that is cached, for all tenants?"):
        raise typer.Exit(EXIT_FAILURE)
