"""An engine of any protocol in a process of its own: writes down what it is sent and says "Hello world!".

    python tests/e2e/other_engine.py --runtime sglang --model NAME --bundle FOLDER --journal FILE

One JSON line for every Generate (`message` as `tests/engines/described.py` writes it, tensors that came by shared
memory read and named in `by_segment`) and for every Abort.  It prints `ready port=N` and ends when standard input does.
With `--puller PROGRAM` (`tests/engines_real/rdma_puller.py`) tensors that are to be pulled over RDMA are (`pulled`);
then the very first descriptor is tried again, and `stale` says what became of that.
"""

import argparse
import asyncio
import base64
import hashlib
import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engines.described import describe  # noqa: E402
from tests.engines.stand_in import Engine, answers, regular_answer  # noqa: E402
from tools.fake.servicer import DIGEST_MARKER, bundle_archive, namespace_id  # noqa: E402

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
        self._light = options.light
        self._puller = Puller(options.puller) if options.puller else None
        self._first_remote = None
        self._hands_over = options.hand_over
        self._identity = bytes.fromhex(options.identity)
        self._hold = options.hold
        self._regular = answers(*REPLY) if options.runtime == "vllm" else regular_answer(*REPLY)
        self.otherwise = self._answer

    async def _answer(self, engine, request, context):
        if self._light and DIGEST_MARKER not in request.tokenized.original_text:
            self.tensors.clear()
            async for reply in self._regular(engine, request, context):
                yield reply
            return
        pulled = {} if self._puller is None else await self._pulled(request)
        self._note("generate", message=describe(self._folded(request)), by_segment=sorted(self.tensors), **pulled)
        self.tensors.clear()
        await self._held()
        async for reply in self._regular(engine, request, context):
            if self._hands_over and reply.HasField("complete"):
                reply.complete.kv_transfer_params_json = self._hands_over
            if self._identity and reply.HasField("complete"):
                reply.complete.media_identity.ParseFromString(self._identity)
            yield reply
            await asyncio.sleep(self._slow)

    async def _held(self):
        while self._hold is not None and self._hold.exists():
            await asyncio.sleep(0.01)

    async def _encode(self, request, context):
        self._note("encode", message=describe(request))
        await self._held()
        return await super()._encode(request, context)

    async def _abort(self, request, context):
        reply = await super()._abort(request, context)
        self._note("abort", request_id=self.aborted[-1])
        return reply

    async def _pulled(self, request):
        found, stale = 0, None
        for item in request.mm_inputs.items:
            if item.encoder_input.WhichOneof("payload") != "remote":
                continue
            remote, found = item.encoder_input.SerializeToString(), found + 1
            told = await self._puller.pull(remote)
            item.encoder_input.inline = base64.b64decode(told["base64"])
            if self._first_remote is None:
                self._first_remote = remote
            else:
                stale = (await self._puller.pull(self._first_remote)).get("error", "read")
        return {"pulled": found, "stale": stale}

    def _folded(self, request):
        """With the bytes of segments inside the message."""
        for item in request.mm_inputs.items if self.runtime == "tokenspeed" else ():
            for tensor in (item.encoder_input, *item.model_specific_tensors.values()):
                if tensor.WhichOneof("payload") == "shm":
                    tensor.inline = self.tensors[tensor.shm.name]
        return request

    def close(self):
        if self._puller is not None:
            self._puller.close()

    def _note(self, event, **facts):
        self._journal.write(json.dumps({"event": event, **facts}) + "\n")
        self._journal.flush()


class Puller:
    """A program that pulls one tensor after the other."""

    def __init__(self, command):
        self._process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = asyncio.Lock()
        assert json.loads(self._process.stdout.readline()) == "up"

    async def pull(self, tensor):
        async with self._lock:
            return await asyncio.to_thread(self._pull, tensor.hex())

    def _pull(self, line):
        print(line, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


async def serve(options: argparse.Namespace) -> None:
    engine = await Recorder(options).start()
    print(f"ready port={engine.port}", flush=True)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(over.set)), daemon=True).start()
    await over.wait()
    await engine.stop()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--label", action="append", default=[], metavar="K=V")
    parser.add_argument("--hand-over", default="", metavar="JSON", help="kv_transfer_params at the end of an answer")
    parser.add_argument("--identity", default="", metavar="HEX", help="media_identity at the end of an answer")
    parser.add_argument("--puller", default="", metavar="PROGRAM", help="reads tensors over RDMA")
    parser.add_argument("--hold", type=Path, help="nothing is answered as long as this file exists")
    parser.add_argument("--light", action="store_true", help="write down only what has the marker of load tests")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS", help="pause behind every message")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
