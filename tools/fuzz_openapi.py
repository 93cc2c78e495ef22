"""Requests made from /openapi.json by schemathesis, against a gateway of its own with an engine stand-in.

    .venv/bin/python tools/fuzz_openapi.py                                      (a minute or two)
    .venv/bin/python tools/fuzz_openapi.py --seconds 900 --seed 7               (before a release)
    .venv/bin/python tools/fuzz_openapi.py --seconds 900 --stateful             (ids from answers into requests)

No answer may be a 5xx, and each must be what the document says of its route: status, content type, headers, body, every
event of a stream; what the document calls wrong must be refused, and nothing may pass without the key.  Afterwards the
gateway must live, hold nothing and have no fault in its log.  Arguments after `--` go to `schemathesis run`.
"""

import http.client
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.fuzzing.live import Site, site  # noqa: E402
from tools.fuzzing.rig import Wrong  # noqa: E402
from tools.fuzzing.served import MODEL  # noqa: E402
from tools.usage import Usage, count, count_or_none  # noqa: E402

KEY = "a-key-of-the-operator"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)
_FLAGS = (
    *("--phases", "coverage,fuzzing"),
    *("--generation-database", "none"),
    "--continue-on-failure",
    "--no-shrink",
    "--no-color",
    *("--suppress-health-check", "all"),
    *("--warnings", "off"),
    *("--request-timeout", "20"),
)


# One request after the other, with what the last one told: not those of workers, as the only engine would be removed.
PROGRAM = (sys.executable, "-m", "schemathesis.cli")  # the script in .venv/bin knows where .venv was made
_STATEFUL = (
    *("--phases", "stateful"),
    *("--exclude-path-regex", "^/workers"),
    *("--checks", ",".join([*CHECKS[:5], "use_after_free", "ensure_resource_availability"])),
)


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and report of `schemathesis run`, and whatever is wrong with the gateway afterwards."""
    with site("--api-key", KEY, "--server-timing") as place, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(narrowed(_document(place))))
        command = [*PROGRAM, "run", str(file), "--url", place.gateway.url]
        command += ["--checks", ",".join(CHECKS), *_FLAGS, "-H", f"Authorization: Bearer {KEY}", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        try:
            place.aftermath()
        except Wrong as error:
            return 1, f"{done.stdout}\n{error}"
        return done.returncode, done.stdout + done.stderr


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """Bodies ask for the model that is served: of any other name nothing but `model_not_found` would be tried."""
    for path in document["paths"].values():
        for operation in path.values():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            body = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], {})
            if "model" in body.get("properties", {}):
                body["properties"]["model"] = {"enum": [MODEL]}
    return document


def _document(place: Site) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*place.address, timeout=20)
    try:
        connection.request("GET", "/openapi.json")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Usage(__doc__)
    parser.add_argument("--seconds", type=count_or_none, default=0, help="go on until then; without it one pass")
    parser.add_argument("--examples", type=count, default=100, help="of one route, in one pass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stateful", action="store_true", help="follow ids through the routes instead")
    parser.add_argument("more", nargs="*", help="arguments of schemathesis")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("schemathesis") is None:
        parser.error("schemathesis is not installed: tools/test installs what tests need")
    limit = ["--max-time", str(options.seconds)] if options.seconds else []
    limit += _STATEFUL if options.stateful else ()
    code, report = run("--seed", str(options.seed), "--max-examples", str(options.examples), *limit, *options.more)
    print(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
