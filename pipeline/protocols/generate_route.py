"""SGLang's `/generate` as one of the APIs that generate."""

import msgspec

from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols import generate
from pipeline.protocols.generate import UNNAMED
from pipeline.protocols.generate_reply import GenerateAnswer
from pipeline.protocols.generation import Asked, ServingModel
from pipeline.protocols.http import COMMENT_PING


class GenerateApi:
    endpoint = "generate"
    keepalive = COMMENT_PING

    def read(self, body: bytearray, serving: ServingModel) -> Asked:
        asked = generate.read(body)
        model = _served(asked.model, serving)
        plan = generate.plan_of(asked, model.sampling_defaults)
        settings = msgspec.structs.replace(asked, text=None, input_ids=None)  # the engine's request has them
        return Asked(model, plan, lambda request: GenerateAnswer(model, settings, request))


def _served(name: str, serving: ServingModel) -> ServedModel:
    """SMG's answer to a request that names no model is the one to a model called `unknown`."""
    try:
        return serving(name)
    except GatewayError as error:
        if name != UNNAMED or error.code != "model_not_found":
            raise
        raise GatewayError(
            error.code, "the request names no model: give `model`; GET /v1/models lists the models there are"
        ) from None
