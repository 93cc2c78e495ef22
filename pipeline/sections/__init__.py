"""The sections of the configuration: each field declared once, with its sentence, range, flag, variable and default.

`pipeline.config` joins them to the Config that the gateway hands around.  A default that depends on the machine or on
another setting is a placeholder here (0, "" or None); `computed` says what `pipeline.resolve` makes of it.

Seconds are floats, bytes are ints.  Flags and variables are called as in SMG 1.11: its command lines carry over.
"""

from pipeline.sections.fleet import Model, Pairs, Workers
from pipeline.sections.media import Media
from pipeline.sections.process import Log, Metrics, Pool
from pipeline.sections.routing import Routing
from pipeline.sections.sending import Transport
from pipeline.sections.serving import Admission, Responses, Server, Tls

__all__ = [
    "Admission",
    "Log",
    "Media",
    "Metrics",
    "Model",
    "Pairs",
    "Pool",
    "Responses",
    "Routing",
    "Server",
    "Tls",
    "Transport",
    "Workers",
]
