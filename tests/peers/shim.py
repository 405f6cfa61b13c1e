# mypy: ignore-errors
"""A peer that has no server of its own, behind `/v1/completions` as the load generator asks: ids in, events out.

    python shim.py openvino FOLDER PORT        (OpenVINO GenAI's continuous batching)
    python shim.py lookup FOLDER PORT          (the same, with guesses from the prompt)
    python shim.py transformers FOLDER PORT    (transformers' continuous batching, bf16)

Runs in the peer's environment, and imports nothing of Octavo. One thread drives the engine; each token is told to the
event loop as it comes. Text is not decoded: the client counts tokens.
"""

import asyncio
import json
import queue
import sys
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


class OpenVino:
    def __init__(self, folder, lookup=False):
        import openvino_genai as genai

        self._genai = genai
        self._lookup = lookup
        config = genai.SchedulerConfig()
        config.cache_size = 2
        config.max_num_seqs = 64
        config.max_num_batched_tokens = 256
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        properties = {"prompt_lookup": True} if lookup else {}
        self._pipe = genai.ContinuousBatchingPipeline(folder, config, "CPU", properties, {})
        self._new = queue.Queue()
        self._live = {}
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, ids, tokens, tell):
        self._new.put((ids, tokens, tell))

    def _run(self):
        import numpy as np
        import openvino as ov

        number = 0
        while True:
            while not self._new.empty() or not self._live:
                ids, tokens, tell = self._new.get()
                config = self._genai.GenerationConfig()
                config.max_new_tokens = tokens
                config.ignore_eos = True
                config.do_sample = False
                if self._lookup:
                    config.num_assistant_tokens, config.max_ngram_size = 5, 3  # as in its samples
                number += 1
                handle = self._pipe.add_request(number, ov.Tensor(np.asarray([ids], dtype=np.int64)), config)
                self._live[number] = [handle, tokens, tell]
            self._pipe.step()
            for key, entry in list(self._live.items()):
                handle, _, tell = entry
                while handle.can_read():
                    for output in handle.read().values():
                        n = len(output.generated_ids)
                        entry[1] -= n
                        tell(n)
                if entry[1] <= 0:
                    del self._live[key]


class Transformers:
    def __init__(self, folder):
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        how = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=512)
        room = ContinuousBatchingConfig(num_blocks=96, max_batch_tokens=512)  # attention runs over all of its cache
        self._manager = model.init_continuous_batching(generation_config=how, continuous_batching_config=room)
        self._manager.start()
        self._live = {}
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, ids, tokens, tell):
        key = self._manager.add_request(ids, max_new_tokens=tokens, streaming=True)
        self._live[key] = [0, tokens, tell]

    def _run(self):
        while True:
            output = self._manager.get_result(timeout=1)
            entry = None if output is None else self._live.get(output.request_id)
            if entry is None:
                time.sleep(0.0005)
                continue
            n = len(output.generated_tokens)
            entry[2](n - entry[0])
            entry[0] = n
            if n >= entry[1]:
                del self._live[output.request_id]


def main():
    kinds = {"openvino": OpenVino, "lookup": lambda folder: OpenVino(folder, True), "transformers": Transformers}
    engine = kinds[sys.argv[1]](sys.argv[2])

    async def completions(request):
        body = await request.json()
        told, loop = asyncio.Queue(), asyncio.get_running_loop()
        tokens = body["max_tokens"]
        engine.ask(body["prompt"], tokens, lambda n: loop.call_soon_threadsafe(told.put_nowait, n))

        async def events():
            seen = 0
            while seen < tokens:
                seen += await told.get()
                yield "data: " + json.dumps({"choices": [{"index": 0, "text": "x"}]}) + "\n\n"
            yield "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": seen}}) + "\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(request):
        return Response()

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[3]), log_level="warning")


if __name__ == "__main__":
    main()
