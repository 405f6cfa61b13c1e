"""Stream a chat from a running `octavo serve` with the official OpenAI client.

python examples/openai_stream.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI


def main(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="not needed")
    model = next(iter(client.models.list())).id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a very short story."}],
        max_completion_tokens=80,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
