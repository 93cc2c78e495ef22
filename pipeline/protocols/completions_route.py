"""Text completions as one of the APIs that generate."""

import msgspec

from pipeline.protocols import completions
from pipeline.protocols.completions_reply import CompletionAnswer
from pipeline.protocols.generation import Asked, ServingModel
from pipeline.protocols.http import COMMENT_PING


class CompletionsApi:
    endpoint = "completions"
    keepalive = COMMENT_PING

    def read(self, body: bytearray, serving: ServingModel) -> Asked:
        asked = completions.read(body)
        model = serving(asked.model)
        plan, *more = completions.plans_of(asked, model.sampling_defaults)
        # the engine's requests have the prompts; answers name the model, not its alias
        settings = msgspec.structs.replace(asked, prompt="", model=model.model)
        return Asked(model, plan, lambda *requests: CompletionAnswer(model, settings, requests), more=more)
