"""Sockets between processes: who binds, who connects, and what happens when a peer is gone."""

from headway.stream.client import GeneratorSocket
from headway.stream.control import LearnerControl, SupervisorControl
from headway.stream.endpoint import Endpoints, host_of, ipc_directory, ipc_endpoint
from headway.stream.heartbeat import HeartbeatThread, LivenessMonitor
from headway.stream.requests import RequestServer, request
from headway.stream.security import ClientSecurity, Guard, ServerSecurity
from headway.stream.server import LearnerSocket

__all__ = [
    "ClientSecurity",
    "Endpoints",
    "GeneratorSocket",
    "Guard",
    "HeartbeatThread",
    "LearnerControl",
    "LearnerSocket",
    "LivenessMonitor",
    "RequestServer",
    "ServerSecurity",
    "SupervisorControl",
    "host_of",
    "ipc_directory",
    "ipc_endpoint",
    "request",
]
