"""Server: many clients ask one language model at the same time, over HTTP.

The program starts the server of `llmppl serve` in a thread, and asks it from eight threads: for typed records, for the
probabilities of a choice. `openai.OpenAI(base_url=...)` sends the same requests.

What to look for: each choice has a weight, its posterior probability. The requests share batches, so that all of them
together take little longer than one.
"""

import argparse
import json
import math
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from llmppl import CachedTransformer
from llmppl.serving import Service
from llmppl.serving.app import make_app

PET = {
    "type": "object", "required": ["kind", "age"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["cat", "dog", "bird"]}, "age": {"type": "integer", "minimum": 1, "maximum": 30}},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server from several threads.")
    parser.add_argument("--lm", default=None, help="a model of the hub; by default the one in the package")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    args = parser.parse_args()

    with Service(CachedTransformer.from_pretrained(args.lm)) as service:
        server = uvicorn.Server(uvicorn.Config(make_app(service), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1/completions"

        def ask(**body: object) -> dict[str, list[dict[str, object]]]:
            request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
            with urllib.request.urlopen(request) as reply:
                answer: dict[str, list[dict[str, object]]] = json.load(reply)
            return answer

        words = ["small", "old", "wild", "tame"][: 2 if args.quick else 4]
        start = time.perf_counter()
        with ThreadPoolExecutor(8) as threads:
            records = threads.map(
                lambda word: ask(prompt=f"The {word} animal was", constraint={"json_schema": PET}, seed=1), words
            )
            for word, record in zip(words, records, strict=True):
                print(f"{word:>6}  {record['choices'][0]['text']}")
        print(f"{len(words)} records in {time.perf_counter() - start:.1f} s")
        [choice] = ask(prompt="The cat was", constraint={"choice": [" big", " small"]}, logprobs=2)["choices"]
        found = choice["logprobs"]
        assert isinstance(found, dict)
        for text, log_prob in found["top_logprobs"][0].items():
            print(f"{math.exp(log_prob):6.3f}  {text}")
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
