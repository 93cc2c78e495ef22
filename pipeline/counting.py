"""How many tokens a prompt has, its media expanded: the first steps of a preparation, and no engine.

Media are fetched and inspected; no pixel is decoded.  A prompt longer than the model's window has a length too.
`pipeline.prepare` has the same steps with everything that follows.
"""

from collections import Counter

from engines.registry import Registry
from pipeline.encode import Encoder
from pipeline.intake import Receiver
from pipeline.plan import UNKNOWN_WINDOW, MediaPlan, ServedModel, check_hints, check_items
from pipeline.prepare import engine_limits, expanded_prompt
from pipeline.prompt import check_anchors
from pipeline.ticket import Ticket


class TokenCounter:
    def __init__(self, registry: Registry, receiver: Receiver, encoder: Encoder) -> None:
        self._registry = registry
        self._receiver = receiver
        self._encoder = encoder

    async def count(self, model: ServedModel, plan: MediaPlan, ticket: Ticket) -> int:
        """Raises GatewayError with the code of the step that failed."""
        known = self._registry.workers_of(model.model, healthy_only=False)
        takers = [worker for worker in known if worker.worker_type != "decode"]
        check_items(model, plan.parts, engine_limits(takers))
        text = model.bundle.template.render(plan.messages, model.anchors, **plan.template_variables)
        ids = await model.bundle.tokenizer.encode(text, most=UNKNOWN_WINDOW)
        counts = Counter(part.modality for part in plan.parts)
        anchors = {**model.anchors, **model.guards}
        check_anchors(ids, {modality: (anchor, counts[modality]) for modality, anchor in anchors.items()})
        if not plan.parts:
            return len(ids)
        check_hints(plan.parts)
        intake = await self._receiver.take_in(plan.parts, ticket)
        looks = await self._encoder.inspect(model, intake, ticket)
        ticket.inputs.close()
        positions = {position: look for look in looks for position in look.item.positions}
        return len(expanded_prompt(model, ids, [positions[position] for position in range(len(plan.parts))]).ids)
