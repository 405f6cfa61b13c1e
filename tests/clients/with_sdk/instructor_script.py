# mypy: ignore-errors
"""instructor: models as tools and as schemas, whole and partial."""

import os

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

BASE, MODEL = os.environ["OCTAVO_URL"] + "/v1", os.environ["OCTAVO_MODEL"]


class Pet(BaseModel):
    """Closed and short, since a small model does not end by itself."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=9)


with openai.OpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "A dog called Rex."}],
        "temperature": 0,
        "max_tokens": 200,
        "max_retries": 0,
    }
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        patched = instructor.from_openai(client, mode=mode)
        assert isinstance(patched.chat.completions.create(response_model=Pet, **asked), Pet), mode
    streamed = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = streamed.chat.completions.create_partial(response_model=Pet, **asked)
    assert last.name is not None
