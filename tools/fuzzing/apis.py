"""Whole bodies of the other APIs, for subjects that twist them: one route, one body with every field."""

from typing import Any

from tools.fuzzing.bodies import BODY
from tools.fuzzing.served import MODEL

RESULT = {"type": "text", "text": "x"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}

MESSAGES: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/a.png"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [RESULT]}]},
    ],
    "stop_sequences": ["a"],
    "stream": False,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {}}}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": MODEL,
    "instructions": "Be kind.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, PICTURE]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
    ],
    "max_output_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.9,
    "stream": False,
    "store": True,
    "previous_response_id": None,
    "text": {"format": {"type": "text"}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": "auto",
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
}  # fmt: skip
COMPLETIONS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "a b",
    "max_tokens": 4,
    "n": 1,
    "echo": False,
    "logprobs": 2,
    "stop": ["x"],
    "stream": False,
    "suffix": None,
    "temperature": 0.5,
    "logit_bias": {"5": 1},
    "seed": 3,
}
TOKENIZE: dict[str, Any] = {"model": MODEL, "prompt": "hello", "messages": None, "add_special_tokens": True}
DETOKENIZE: dict[str, Any] = {"model": MODEL, "tokens": [1, 2, 3], "skip_special_tokens": True}

GENERATE: dict[str, Any] = {
    "model": MODEL,
    "text": "hello",
    "input_ids": None,
    "sampling_params": {
        "max_new_tokens": 4,
        "n": 1,
        "temperature": 0.5,
        "stop": ["x"],
        "json_schema": None,
        "regex": None,
    },
    "stream": False,
    "return_logprob": True,
    "top_logprobs_num": 2,
    "rid": "r",
}
CALLS_TEXT = '<tool_call>{"name": "f", "arguments": {"a": [1, "x"]}}</tool_call><function=f><parameter=a>1</parameter>'
PARSE_CALLS: dict[str, Any] = {
    "text": CALLS_TEXT,
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    ],
    "tool_call_parser": "qwen",
}
PARSE_REASONING: dict[str, Any] = {"text": "<think>a</think>b", "reasoning_parser": "qwen3"}
CONVERSATION: dict[str, Any] = {"metadata": {"a": "b"}, "items": RESPONSES["input"]}

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", BODY),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", {name: value for name, value in MESSAGES.items() if name != "max_tokens"}),
    ("/v1/responses", RESPONSES),
    ("/v1/completions", COMPLETIONS),
    ("/v1/tokenize", TOKENIZE),
    ("/v1/detokenize", DETOKENIZE),
    ("/generate", GENERATE),
    ("/parse/function_call", PARSE_CALLS),
    ("/parse/reasoning", PARSE_REASONING),
    ("/v1/conversations", CONVERSATION),
)
