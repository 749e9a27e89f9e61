"""A server of a language model on a free port, and requests to it."""

import contextlib
import http.client
import json
import threading
import time

import uvicorn

from helpers.common import HANG
from llmppl.serving import Service
from llmppl.serving.app import make_app

KEY = "secret"


@contextlib.contextmanager
def served(lm, **options):
    """Run a server, with its port, its service and its model."""
    with Service(lm) as service:
        made = uvicorn.Server(uvicorn.Config(make_app(service, key=KEY, **options), port=0, log_level="error"))
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        while not made.started:
            assert thread.is_alive()
            time.sleep(0.01)
        made.port, made.service, made.lm = made.servers[0].sockets[0].getsockname()[1], service, lm
        yield made
        made.should_exit = True
        thread.join(HANG)


def post(server, path, body, key=KEY):
    """Return the status and the data of the reply to a body, in JSON or as bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", path, data, headers)
    reply = connection.getresponse()
    return reply.status, reply.read()
