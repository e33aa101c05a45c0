"""The messages of the gRPC API, built at import from the table below. headgate.proto is the same for clients.

There is no generated code: a test compiles headgate.proto and compares the descriptors.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["FILE", "METHODS", "SERVICE_NAME", "message_class"]

PACKAGE: Final = "headgate.v1"
SERVICE_NAME: Final = f"{PACKAGE}.RateLimiter"

METHODS: Final = {
    "Check": ("CheckRequest", "Decision"),
    "Peek": ("PeekRequest", "Decision"),
    "Reserve": ("LeaseRequest", "Decision"),
    "Commit": ("CommitRequest", "Decision"),
    "Refund": ("RefundRequest", "Change"),
    "Hold": ("LeaseRequest", "Decision"),
    "Renew": ("LeaseRequest", "Change"),
    "Leave": ("LeaseRequest", "Change"),
}
"""Name of the call: its request and its response."""

_MESSAGES: Final = {
    "Limit": ("string limit", "string name", "repeated string by", "string algorithm", "optional int64 cost"),
    "DescribedRequest": ("string method", "string path", "string ip", "map headers", "map identities"),
    "CheckRequest": ("DescribedRequest request", "repeated Limit limits", "string id"),
    "PeekRequest": ("repeated Limit limits",),
    "LeaseRequest": ("repeated Limit limits", "string id"),
    "CommitRequest": ("repeated Limit limits", "string id", "optional int64 actual"),
    "RefundRequest": ("Limit limit", "optional int64 amount", "string id"),
    "LimitState": (
        "string name",
        "bool allowed",
        "int64 remaining",
        "optional double retry_after",
        "double reset_after",
        "int64 uncharged",
    ),
    "Decision": (
        "bool allowed",
        "string reason",
        "optional int64 remaining",
        "optional double retry_after",
        "optional double reset_after",
        "double delay",
        "repeated string denied_by",
        "optional string degraded",
        "optional string id",
        "repeated LimitState limits",
        "optional int32 status",
        "map headers",
    ),
    "Change": ("bool changed",),
}
"""The fields of each message, numbered from 1; a map is one from string to string."""

_FIELD: Final = descriptor_pb2.FieldDescriptorProto


def _build() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="headgate.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            _add_field(message, number, text)
    service = file.service.add(name=SERVICE_NAME.rpartition(".")[2])
    for name, (request, response) in METHODS.items():
        service.method.add(name=name, input_type=f".{PACKAGE}.{request}", output_type=f".{PACKAGE}.{response}")
    return file


def _add_field(message: Any, number: int, text: str) -> None:
    *label, kind, name = text.split()
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL, json_name=_json_name(name))
    if label == ["repeated"]:
        field.label = _FIELD.LABEL_REPEATED
    elif label == ["optional"]:  # has a presence, which proto3 expresses as a oneof of one field
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if kind == "map":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string key")
        _add_field(entry, 2, "string value")
        field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
    elif kind in _MESSAGES:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")


def _json_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))


FILE: Final = _build()
_POOL: Final = descriptor_pool.Default()
_POOL.AddSerializedFile(FILE.SerializeToString())


def message_class(name: str) -> Any:
    """The class of a message, given its name without the package."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
