"""`llmppl serve`: the endpoints of OpenAI over a language model."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from llmppl.cli import options
from llmppl.cli.options import Given, command

PATIENCE = 1.0  # CPU seconds of a step, for which other requests wait


@command("lm")
def serve(
    given: Given,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    key: Annotated[
        str | None, typer.Option(envvar="LLMPPL_KEY", help="Requests must carry this key.")
    ] = None,
    together: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 16,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 1000,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Longest time of an answer, in seconds.")
    ] = 120.0,
) -> None:
    """Serve the endpoints of OpenAI for chat, completions and decisions, with constraints and weights.

    Example: llmppl serve --lm smollm2 --port 8000
    """
    try:
        import uvicorn

        from llmppl.serving.app import make_app
        from llmppl.serving.bodies import Limits
        from llmppl.serving.intake import keep_collections_short, timed_protocol
    except ImportError as error:
        raise ImportError(
            f"llmppl serve needs FastAPI and uvicorn ({error}): pip install 'llmppl-smc[server]'"
        ) from None
    from llmppl.serving import Service

    name = given.lm or "llmppl"
    start = time.perf_counter()
    typer.echo(
        f"{time.strftime('%H:%M:%S')} loading {given.lm or 'the model in the package'}", err=True
    )
    sys.setswitchinterval(0.0001)  # threads that prepare requests take turns with the model
    lm = options.load(given.lm)
    with Service(lm, together=together, max_waiting=waiting, patience=PATIENCE) as service:
        typer.echo(f"loaded in {time.perf_counter() - start:.1f} s", err=True)
        app = make_app(service, name=name, key=key, limits=Limits(seconds=timeout))
        keep_collections_short()
        uvicorn.run(app, host=host, port=port, http=timed_protocol(), log_level="info")
