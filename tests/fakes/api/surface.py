"""Every route and every method that our services have, as they say themselves: what is new is found without a word."""

from __future__ import annotations

from typing import Any

import grpc
from fastapi.routing import APIRoute
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from starlette.routing import Route

from coppice_rpc.v1 import cache_admin_pb2, cache_pb2, scheduler_pb2, worker_pb2

QUESTIONS = ("GET", "HEAD")
CALL_S = 60.0


def services() -> list[ServiceDescriptor]:
    """Of all our protos."""
    modules = (cache_pb2, cache_admin_pb2, scheduler_pb2, worker_pb2)
    return [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]


def methods(*names: str) -> list[MethodDescriptor]:
    """Methods of the services of these names, such as `PrefixIndex`; of all without names."""
    return [method for service in services() if not names or service.name in names for method in service.methods]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def call(channel: grpc.Channel, method: MethodDescriptor, request: Any = None) -> grpc.StatusCode:
    """How a call ends, or begins where it is a stream; with an empty request if none is given."""
    request_type = message_factory.GetMessageClass(method.input_type)
    asked = channel.unary_stream(path_of(method), request_type.SerializeToString, None)
    answers = asked(request_type() if request is None else request, timeout=CALL_S)
    try:
        next(answers)
        if not method.server_streaming:
            assert not list(answers)
    except grpc.RpcError as error:
        return error.code()
    finally:
        answers.cancel()
    return grpc.StatusCode.OK


def routes(app: Any) -> list[tuple[str, str]]:
    """Method and path of each route of an application; parameters of paths are `a`."""
    found: list[tuple[str, str]] = []
    for route in app.routes:
        assert isinstance(route, Route | APIRoute), f"{route!r} is of a kind that is not walked here"
        path = route.path
        for name in route.param_convertors:
            path = path.replace(f"{{{name}:path}}", "a").replace(f"{{{name}}}", "a")
        found += [(method, path) for method in sorted(route.methods or ())]
    return found
