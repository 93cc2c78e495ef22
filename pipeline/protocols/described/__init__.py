"""What every route takes and answers, for `/openapi.json`: an `Operation` for each, and the types of the answers.

A route cannot be declared without one (`pipeline.serve.Route`).
"""

from pipeline.protocols.described import (
    chat,
    completions,
    conversations,
    generate,
    messages,
    models,
    parse,
    responses,
    tokens,
    workers,
)

__all__ = [
    "chat",
    "completions",
    "conversations",
    "generate",
    "messages",
    "models",
    "parse",
    "responses",
    "tokens",
    "workers",
]
