"""Weights in place: how one policy version gets from the learner into running generators."""

from headway.weights.channel import (
    ChannelReceiver,
    ChannelSender,
    Payload,
    PayloadHeader,
    PayloadKind,
    Publication,
)
from headway.weights.digest import state_digest
from headway.weights.doubled import DoubledServed
from headway.weights.open import choose_channel, open_publisher, open_receiver, open_sender, open_stager
from headway.weights.own import publish_through, receive_from
from headway.weights.publisher import Published, WeightPublisher
from headway.weights.segment import segment_name
from headway.weights.served import FlatServed, Served, SlicedServed, published_dtype
from headway.weights.staged import Proof
from headway.weights.stager import Stager
from headway.weights.stager_thread import StagerThread

__all__ = [
    "ChannelReceiver",
    "ChannelSender",
    "DoubledServed",
    "FlatServed",
    "Payload",
    "PayloadHeader",
    "PayloadKind",
    "Proof",
    "Publication",
    "Published",
    "Served",
    "SlicedServed",
    "Stager",
    "StagerThread",
    "WeightPublisher",
    "choose_channel",
    "open_publisher",
    "open_receiver",
    "open_sender",
    "open_stager",
    "publish_through",
    "published_dtype",
    "receive_from",
    "segment_name",
    "state_digest",
]
