"""Prints what a vLLM worker says of itself to its media sidecar, as JSON for `gateway.py sidecar --fingerprint-file`.

    PYTHON tools/vllm_fingerprint.py --model MODEL [the worker's engine flags] > worker.json

PYTHON is that of the worker's environment, with vLLM and smg-grpc-servicer[vllm]: the fingerprint is derived by the
published sidecar's own code, from a configuration vLLM makes of the flags.  `VLLM_VIDEO_LOADER_BACKEND` must be set as
the worker's.
"""

import json
import sys

try:
    from smg_grpc_servicer.vllm.mm_sidecar import build_config, config_fingerprint
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError as error:
    print(f"vllm_fingerprint: {error}: run it with the Python of the worker's environment", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__))
    config = build_config(parser.parse_args())
    multimodal = config.model_config.get_multimodal_config()
    told = {"mm_device_do_normalize": bool(getattr(multimodal, "mm_device_do_normalize", False))}
    print(json.dumps(config_fingerprint(config).to_hello() | told, indent=1))


if __name__ == "__main__":
    main()
