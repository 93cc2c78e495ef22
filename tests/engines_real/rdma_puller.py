"""The published servicer's RDMA puller, for a TokenSpeed stand-in: one TensorData a line, its bytes or why not a line.

    ENV/bin/python tests/engines_real/rdma_puller.py          in the torch worker's environment, NIXL on PYTHONPATH

Lines are hexadecimal in, JSON out (`base64` or `error`); the first one out says `up`.  Everything that reads is the
servicer's own code; only `pin_memory` is dropped, which a torch without CUDA refuses.
"""

import base64
import json
import os
import sys

import torch
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

_empty = torch.empty
torch.empty = lambda *sizes, **options: _empty(*sizes, **{k: v for k, v in options.items() if k != "pin_memory"})

from smg_grpc_servicer.mm_rdma import RdmaPixelPuller  # noqa: E402


def main() -> int:
    out = os.fdopen(os.dup(1), "w")  # NIXL logs to standard output as well
    os.dup2(2, 1)
    puller = RdmaPixelPuller(agent_name=f"worker-{os.getpid()}", log_prefix="check")
    if puller._nixl_agent is None:
        print("the puller did not come up", file=sys.stderr)
        return 1
    print(json.dumps("up"), file=out, flush=True)
    for line in sys.stdin:
        tensor = pb.TensorData.FromString(bytes.fromhex(line))
        try:
            got = puller.feature_from_remote(tensor, explicit_room=None, cast_to=None)
            said = {"base64": base64.b64encode(got.contiguous().view(torch.uint8).numpy().tobytes()).decode()}
        except Exception as error:  # whatever it raises is the answer
            said = {"error": repr(error)}
        print(json.dumps(said), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
