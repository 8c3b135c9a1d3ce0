"""What processes say to each other: typed messages, their bytes, and the checks on what comes in."""

from headway.wire.codec import DEFAULT_LIMITS, Limits, decode, encode
from headway.wire.messages import SCHEMA, DataMessage

__all__ = ["DEFAULT_LIMITS", "SCHEMA", "DataMessage", "Limits", "decode", "encode"]
