"""A worker that computes: vLLM's protocol in front of transformers' Qwen3-VL on a CPU, in an environment of its own.

The vision tower sees the tensors that arrived, its rows go to the positions the placeholder ranges name, the answer
is greedy.  So a wrong pixel, grid, range or prompt is refused or changes the log-probabilities.  Tensors and segments
are decoded by the published servicer's own code.  No cache: unlike vLLM it never answers for a hash it has seen.
Imports nothing of the project.

    ENV/bin/python tests/engines_real/torch_worker.py --model FOLDER --journal FILE [--float-pixels] [--hide-bundle]

A JSON schema or a regular expression holds the output, by llguidance, which vLLM can use as well.

prints `ready port=N`.  Not covered: references, n > 1, sampling, stop strings, abort in the middle of an answer.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc
import llguidance
import llguidance.hf
import llguidance.torch
import torch
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc
from smg_grpc_servicer.mm_shm import shm_namespace_id
from smg_grpc_servicer.tokenizer_bundle import CHUNK_SIZE, TokenizerBundle
from smg_grpc_servicer.vllm.mm_tensors import tensor_from_proto
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

END = 151645
MODEL_NAME = "tiny-qwen3vl"


class Refused(Exception):
    """The request contradicts itself or this worker's announcement."""


class Batch:
    """One modality of a request: normalised pixels, the grid, and which prompt tokens its rows replace."""

    def __init__(self, message, config, float_pixels):
        self.video = message.modality == common_pb2.VIDEO
        word = "video" if self.video else "image"
        self.token = config.video_token_id if self.video else config.image_token_id
        if f"{word}_grid_thw" not in message.model_specific_tensors:
            raise Refused(f"no {word}_grid_thw")
        arrived = tensor_from_proto(message.pixel_values)
        side = {name: tensor_from_proto(tensor) for name, tensor in message.model_specific_tensors.items()}
        self.grid = side[f"{word}_grid_thw"].long()
        self.names = {"pixels": "pixel_values_videos" if self.video else "pixel_values", "grid": f"{word}_grid_thw"}
        self.pixels = self._floats(arrived, float_pixels)
        self.ranges = [(place.offset, place.length) for place in message.mm_placeholders]
        self.merge = config.vision_config.spatial_merge_size
        self._check(len(message.mm_hashes), arrived)
        self.row = {
            "modality": word,
            "shape": list(arrived.shape),
            "dtype": str(arrived.dtype).removeprefix("torch."),
            "transport": message.pixel_values.WhichOneof("payload"),
            "sha256": digest(arrived),
            "levels_sha256": levels_digest(arrived),
            "grid": self.grid.tolist(),
            "ranges": [list(place) for place in self.ranges],
            "hashes": list(message.mm_hashes),
        }

    def _floats(self, arrived, float_pixels):
        """As vLLM: a worker that normalises rescales whatever arrives; so the kind of pixels is checked first."""
        if float_pixels == (arrived.dtype == torch.uint8):
            raise Refused(f"pixels are {arrived.dtype}, this worker takes {'floats' if float_pixels else 'uint8'}")
        return arrived.float() if float_pixels else (arrived.float() / 255.0 - 0.5) / 0.5

    def _check(self, hashes, arrived):
        patches = int(self.grid.prod(-1).sum())
        if patches != arrived.shape[0]:
            raise Refused(f"the grid names {patches} patches, {arrived.shape[0]} arrived")
        if not len(self.grid) == len(self.ranges) == hashes:
            raise Refused(f"{len(self.grid)} grid rows, {len(self.ranges)} ranges, {hashes} hashes")

    def mark(self, ids, kinds):
        """Set the kind of every token this batch fills; refuse ranges that do not hold exactly the item's tokens."""
        for item, (offset, length) in zip(self.grid, self.ranges, strict=True):
            here = ids[0, offset : offset + length] == self.token
            wanted = int(item.prod()) // self.merge**2
            if offset + length > ids.shape[1] or int(here.sum()) != wanted:
                raise Refused(
                    f"range {offset}+{length} holds {int(here.sum())} feature tokens, the item yields {wanted}"
                )
            if not self.video and not bool(here.all()):
                raise Refused(f"range {offset}+{length} covers other tokens, too")
            kinds[0, offset : offset + length][here] = 2 if self.video else 1


class Held:
    """A logits processor that leaves only tokens the constraint allows next; one for each answer."""

    def __init__(self, tokenizer, grammar, prompt_tokens):
        self.matcher = llguidance.LLMatcher(tokenizer, grammar)
        if self.matcher.is_error():
            raise Refused(self.matcher.get_error())
        self.seen = prompt_tokens
        self.mask = llguidance.torch.allocate_token_bitmask(1, tokenizer.vocab_size)

    def __call__(self, ids, scores):
        self.matcher.consume_tokens(ids[0, self.seen :].tolist())
        self.seen = ids.shape[1]
        llguidance.torch.fill_next_token_bitmask(self.matcher, self.mask)
        llguidance.torch.apply_token_bitmask_inplace(scores, self.mask)
        return scores


def grammar_of(params):
    """None when nothing holds the output."""
    kind = params.WhichOneof("constraint")
    if kind == "json_schema":
        rules = {"whitespace_flexible": False}
        return llguidance.LLMatcher.grammar_from_json_schema(params.json_schema, overrides=rules)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if kind is not None:
        raise Refused(f"a constraint of kind {kind}")
    return None


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def levels_digest(tensor):
    """SHA-256 of the 0..255 levels behind the pixels; empty unless they give exactly these floats again."""
    if tensor.dtype == torch.uint8:
        return digest(tensor)
    levels = (tensor.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    again = ((levels.float() - 127.5) / 127.5).to(tensor.dtype)
    return digest(levels) if torch.equal(again, tensor) else ""


class Worker(rpc.VllmEngineServicer):
    def __init__(self, options):
        self.options = options
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32).eval()
        self.config = self.model.config
        vocabulary = self.config.text_config.vocab_size
        self.tokenizer = llguidance.hf.from_tokenizer(AutoTokenizer.from_pretrained(options.model), n_vocab=vocabulary)
        self.bundle = TokenizerBundle.build(Path(options.model))
        self.lock = threading.Lock()

    # ---- registration

    def HealthCheck(self, request, context):
        return pb.HealthCheckResponse(healthy=True, message="OK")

    def GetModelInfo(self, request, context):
        path = "/nonexistent/model" if self.options.hide_bundle else self.options.model
        return pb.GetModelInfoResponse(
            model_path=path,
            tokenizer_path=path,
            served_model_name=MODEL_NAME,
            is_generation=True,
            supports_vision=True,
            max_context_length=8192,
            max_req_input_len=8192,
            vocab_size=self.config.text_config.vocab_size,
            model_type=self.config.model_type,
            architectures=["Qwen3VLForConditionalGeneration"],
            eos_token_ids=[END],
        )

    def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse(
            server_type="vllm-grpc",
            data_parallel_size=1,
            shm_namespace_id=shm_namespace_id(),
            mm_device_do_normalize=not self.options.float_pixels,
        )

    def GetTokenizer(self, request, context):
        data, fingerprint = self.bundle
        for start in range(0, len(data), CHUNK_SIZE):
            last = start + CHUNK_SIZE >= len(data)
            piece = data[start : start + CHUNK_SIZE]
            yield common_pb2.GetTokenizerChunk(data=piece, sha256=fingerprint if last else "")

    def Abort(self, request, context):
        return pb.AbortResponse()

    # ---- computation

    def Generate(self, request, context):
        try:
            ids, kinds, batches = self.read(request)
            grammar = grammar_of(request.sampling_params)
            held = [Held(self.tokenizer, grammar, ids.shape[1])] if grammar else []
        except (Refused, ValueError, KeyError, OSError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{type(error).__name__}: {error}")
        self.note(request.request_id, ids, batches)
        params = request.sampling_params
        tokens, rows = self.compute(ids, kinds, batches, params, held)
        stopped = bool(tokens) and tokens[-1] == END and not params.ignore_eos
        reason = "stop" if stopped else "length"
        count = ids.shape[1]
        if request.stream:
            for at, token in enumerate(tokens):
                facts = {
                    "prompt_tokens": count,
                    "completion_tokens": 1,
                    "output_logprobs": wire([token], rows[at : at + 1]),
                }
                yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[token], **facts))
        sent, said = (tokens[-1:], rows[-1:]) if request.stream else (tokens, rows)
        facts = {"prompt_tokens": count, "completion_tokens": len(sent), "output_logprobs": wire(sent, said)}
        yield pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=sent, finish_reason=reason, **facts))

    def read(self, request):
        """Prompt ids, the kind of every token, and batches.  Segments are consumed while tensors are decoded."""
        if request.WhichOneof("input") != "tokenized" or request.HasField("media_refs"):
            raise Refused("tokenized input and tensors only")
        messages = [message for message in (request.mm_inputs, *request.extra_mm_inputs) if message.ByteSize()]
        batches = [Batch(message, self.config, self.options.float_pixels) for message in messages]
        ids = torch.tensor([list(request.tokenized.input_ids)], dtype=torch.int64)
        kinds = torch.zeros_like(ids)
        for batch in batches:
            batch.mark(ids, kinds)
        features = (ids == self.config.image_token_id) | (ids == self.config.video_token_id)
        if not torch.equal(features, kinds > 0):
            raise Refused("a feature token stands outside every range")
        return ids, kinds, batches

    def compute(self, ids, kinds, batches, params, held):
        """Greedy tokens, and for each (log-probability, alternatives' values, alternatives' ids)."""
        extra = {}
        for batch in batches:
            extra |= {batch.names["pixels"]: batch.pixels, batch.names["grid"]: batch.grid}
        if extra:
            extra["mm_token_type_ids"] = kinds
        limit = params.max_tokens if params.HasField("max_tokens") else 16
        ends = None if params.ignore_eos else [END, *params.stop_token_ids]
        with self.lock, torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=limit,
                eos_token_id=ends,
                pad_token_id=151643,
                output_logits=True,
                logits_processor=held,
                return_dict_in_generate=True,
                **extra,
            )
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        wanted = max(1, params.logprobs) if params.HasField("logprobs") else 1
        rows = []
        for token, logits in zip(tokens, out.logits, strict=True):
            values = torch.log_softmax(logits[0].float(), -1)
            top = torch.topk(values, wanted)
            rows.append((float(values[token]), top.values.tolist(), top.indices.tolist()))
        return tokens, rows

    def note(self, request_id, ids, batches):
        if self.options.journal:
            line = json.dumps(
                {"request_id": request_id, "input_ids": ids[0].tolist(), "media": [b.row for b in batches]}
            )
            with self.lock, open(self.options.journal, "a") as journal:
                journal.write(line + "\n")


def wire(tokens, rows):
    return pb.OutputLogProbs(
        token_ids=tokens,
        token_logprobs=[row[0] for row in rows],
        top_logprobs=[pb.TopLogProbs(values=row[1], token_ids=row[2]) for row in rows],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--journal")
    parser.add_argument("--float-pixels", action="store_true", help="announce and insist on normalised floats")
    parser.add_argument("--hide-bundle", action="store_true", help="report a path that does not exist")
    options = parser.parse_args()
    torch.set_num_threads(1)
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(16), options=limits)
    rpc.add_VllmEngineServicer_to_server(Worker(options), server)
    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: server.stop(0.2))
    print(f"ready port={port} pid={os.getpid()}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    sys.exit(main())
