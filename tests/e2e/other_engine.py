"""An engine of any protocol in a process of its own: writes down what it is sent and says "Hello world!".

    python tests/e2e/other_engine.py --runtime sglang --model NAME --bundle FOLDER --journal FILE

One JSON line for every Generate (`message` as `tests/engines/described.py` writes it, tensors that came by shared
memory read and named in `by_segment`) and for every Abort.  It prints `ready port=N` and ends when standard input does.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engines.described import describe  # noqa: E402
from tests.engines.stand_in import Engine, answers, regular_answer  # noqa: E402
from tools.fake.servicer import bundle_archive, namespace_id  # noqa: E402

REPLY = (9707, 1879, 0)  # Hello world!


class Recorder(Engine):
    """The engine of the tests, with a journal."""

    def __init__(self, options: argparse.Namespace) -> None:
        labels = dict(text.split("=", 1) for text in options.label)
        blind = labels.pop("supports_vision", "") == "false"
        path = "" if options.runtime == "trtllm" else str(options.bundle)
        told = {"scheduler_info": {"shm_namespace_id": namespace_id()}} if options.runtime == "tokenspeed" else {}
        told |= {name: labels.pop(name) for name in list(labels) if name.startswith(("kv_", "mm_"))}
        super().__init__(
            runtime=options.runtime,
            model_info={"served_model_name": options.model, "model_path": path, "tokenizer_path": path, **labels}
            | ({"supports_vision": False} if blind else {}),
            server_info=told,
            segments=Path("/dev/shm") if options.runtime in ("vllm", "tokenspeed") else None,
        )
        archive = bundle_archive(options.bundle)
        self.bundle = [(archive, hashlib.sha256(archive).hexdigest())]
        self._journal = options.journal.open("a")
        self._slow = options.slow
        self._hands_over = options.hand_over
        self._identity = bytes.fromhex(options.identity)
        self._regular = answers(*REPLY) if options.runtime == "vllm" else regular_answer(*REPLY)
        self.otherwise = self._answer

    async def _answer(self, engine, request, context):
        self._note("generate", message=describe(self._folded(request)), by_segment=sorted(self.tensors))
        self.tensors.clear()
        async for reply in self._regular(engine, request, context):
            if self._hands_over and reply.HasField("complete"):
                reply.complete.kv_transfer_params_json = self._hands_over
            if self._identity and reply.HasField("complete"):
                reply.complete.media_identity.ParseFromString(self._identity)
            yield reply
            await asyncio.sleep(self._slow)

    async def _abort(self, request, context):
        reply = await super()._abort(request, context)
        self._note("abort", request_id=self.aborted[-1])
        return reply

    def _folded(self, request):
        """With the bytes of segments inside the message."""
        for item in request.mm_inputs.items if self.runtime == "tokenspeed" else ():
            for tensor in (item.encoder_input, *item.model_specific_tensors.values()):
                if tensor.WhichOneof("payload") == "shm":
                    tensor.inline = self.tensors[tensor.shm.name]
        return request

    def _note(self, event, **facts):
        self._journal.write(json.dumps({"event": event, **facts}) + "\n")
        self._journal.flush()


async def serve(options: argparse.Namespace) -> None:
    engine = await Recorder(options).start()
    print(f"ready port={engine.port}", flush=True)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(over.set)), daemon=True).start()
    await over.wait()
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--label", action="append", default=[], metavar="K=V")
    parser.add_argument("--hand-over", default="", metavar="JSON", help="kv_transfer_params at the end of an answer")
    parser.add_argument("--identity", default="", metavar="HEX", help="media_identity at the end of an answer")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS", help="pause behind every message")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
