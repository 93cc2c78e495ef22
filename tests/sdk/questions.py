"""What the SDKs are used for here: a function with arguments, a schema for an answer, a screenshot."""

import base64

from pydantic import BaseModel

from tests.e2e.running import picture

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
ARGUMENTS = {"city": "Paris", "days": 3}
FORECAST = '{"city": "Rome", "days": 2}'
SCREEN_TOKENS = 70  # of Qwen3-VL's grid 1 x 14 x 20 for 200 x 300 pixels


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


ROME = Weather(city="Rome", days=2)
SCREEN = picture()
SCREEN_BASE64 = base64.b64encode(SCREEN).decode()
SEEN = f"{SCREEN_TOKENS} image tokens"


def say(text: str) -> str:
    return f"[[say {text}]]"
