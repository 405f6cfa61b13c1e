"""Ask a model from a script, without HTTP: the daemon's processes start and stop around `octavo.LLM`.

python examples/ask.py [MODEL]
"""

import sys

import octavo

QUESTIONS = ["What is 2+2?", "What is the capital of France?"]


def main(model: str) -> None:
    with octavo.LLM(model) as llm:
        for question in QUESTIONS:
            answer = llm.chat([{"role": "user", "content": question}], temperature=0, max_tokens=40)
            print(f"{question}\n  {answer.text}")
        # Several prompts at once are one batch, and n continuations of a prompt share its computation.
        for output in llm.generate(["Once upon a time", "In a hole in the ground"], n=2, seed=1, max_tokens=20):
            for choice in output.choices:
                print(f"{choice.finish}: {choice.text!r} ({choice.usage.cached} prompt tokens were cached)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "default")
