# mypy: ignore-errors
"""litellm: as an OpenAI server, as a vLLM server, and completions; whole, streamed, with tools."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest

BASE, MODEL = os.environ["OCTAVO_URL"] + "/v1", os.environ["OCTAVO_MODEL"]
USER = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

for provider in ("openai", "hosted_vllm"):
    how = {"model": f"{provider}/{MODEL}", "api_base": BASE, "api_key": "none", "temperature": 0}
    whole = litellm.completion(messages=USER, max_tokens=12, **how)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens
    chunks = list(
        litellm.completion(messages=USER, max_tokens=12, stream=True, stream_options={"include_usage": True}, **how)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert any(getattr(chunk, "usage", None) for chunk in chunks)
    called = litellm.completion(messages=USER, tools=[TOOL], tool_choice="required", max_tokens=120, **how)
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    shaped = litellm.completion(messages=USER, response_format={"type": "json_object"}, max_tokens=150, **how)
    assert shaped.choices[0].message.content.lstrip().startswith("{")
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="Once upon", api_base=BASE, api_key="none", max_tokens=5
)
assert text.choices[0].text
with pytest.raises(litellm.NotFoundError):
    litellm.completion(model="openai/other", messages=USER, api_base=BASE, api_key="none")
