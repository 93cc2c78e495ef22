"""SGLang's `/generate` as one of the APIs that generate."""

import msgspec

from pipeline.protocols import generate
from pipeline.protocols.generate_reply import GenerateAnswer
from pipeline.protocols.generation import Asked, ServingModel
from pipeline.protocols.http import COMMENT_PING


class GenerateApi:
    endpoint = "generate"
    keepalive = COMMENT_PING

    def read(self, body: bytearray, serving: ServingModel) -> Asked:
        asked = generate.read(body)
        model = serving(asked.model)
        plan = generate.plan_of(asked, model.sampling_defaults)
        settings = msgspec.structs.replace(asked, text=None, input_ids=None)  # the engine's request has them
        return Asked(model, plan, lambda request: GenerateAnswer(model, settings, request))
