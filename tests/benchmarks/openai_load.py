"""A load sent by the published `openai` client; runs in an environment of its own, without `workbench`.

Reads {"url", "model", "concurrency", "fields", "questions": [{"content", "max_tokens"}]}, a line, from standard input.
The first question is asked once, which loads the client's code; then it says "ready" and waits for another line, sends
the load and prints {"requests": [[first token s, s per token after it, tokens]], "seconds"} as a line.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai


def main() -> None:
    load = json.loads(sys.stdin.readline())
    with openai.OpenAI(base_url=load["url"], api_key="none", max_retries=0) as client:

        def ask(question: dict) -> tuple[float, float, int]:
            started = time.perf_counter()
            stream = client.chat.completions.create(
                model=load["model"],
                messages=[{"role": "user", "content": question["content"]}],
                max_completion_tokens=question["max_tokens"],
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=load["fields"],
            )
            times, tokens = [], 0
            for chunk in stream:
                if any(choice.delta.content for choice in chunk.choices):
                    times.append(time.perf_counter())
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
            return times[0] - started, (times[-1] - times[0]) / (tokens - 1), tokens

        assert load["model"] in [model.id for model in client.models.list()]
        ask(load["questions"][0])
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        with ThreadPoolExecutor(load["concurrency"]) as pool:
            requests = list(pool.map(ask, load["questions"]))
        print(json.dumps({"requests": requests, "seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
