"""The kubelet's device plugin interface ``v1beta1``, as far as Kiwi uses it.

A message is a class here; the number behind each field is that of ``api.proto``
(k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1). Fields that are not listed are ignored when read
and left out when written, as in any protobuf message. The descriptors are made at run time:
generated code would only work with the versions of protobuf that it was generated for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message as ProtobufMessage

VERSION: Final = "v1beta1"
REGISTRATION: Final = "v1beta1.Registration"
DEVICE_PLUGIN: Final = "v1beta1.DevicePlugin"
KUBELET_SOCKET: Final = "kubelet.sock"
"""Name of the kubelet's own socket, in the directory of the device plugins."""

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"


class KubeletMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the interface."""


class Empty(KubeletMessage, frozen=True):
    pass


class DevicePluginOptions(KubeletMessage, frozen=True, kw_only=True):
    pre_start_required: Annotated[bool, 1] = False
    get_preferred_allocation_available: Annotated[bool, 2] = False


class RegisterRequest(KubeletMessage, frozen=True, kw_only=True):
    """``endpoint`` is the name of the plugin's socket beside the kubelet's."""

    version: Annotated[str, 1] = ""
    endpoint: Annotated[str, 2] = ""
    resource_name: Annotated[str, 3] = ""
    options: Annotated[DevicePluginOptions, 4] = DevicePluginOptions()


class Device(KubeletMessage, frozen=True, kw_only=True):
    """A place. ``ID`` has 63 characters at most; ``health`` is ``HEALTHY`` or ``UNHEALTHY``."""

    ID: Annotated[str, 1] = ""
    health: Annotated[str, 2] = ""


class ListAndWatchResponse(KubeletMessage, frozen=True, kw_only=True):
    devices: Annotated[list[Device], 1] = []


class ContainerPreferredAllocationRequest(KubeletMessage, frozen=True, kw_only=True):
    available_deviceIDs: Annotated[list[str], 1] = []  # noqa: N815  (the interface's name)
    must_include_deviceIDs: Annotated[list[str], 2] = []  # noqa: N815
    allocation_size: Annotated[int, 3] = 0


class PreferredAllocationRequest(KubeletMessage, frozen=True, kw_only=True):
    container_requests: Annotated[list[ContainerPreferredAllocationRequest], 1] = []


class ContainerPreferredAllocationResponse(KubeletMessage, frozen=True, kw_only=True):
    deviceIDs: Annotated[list[str], 1] = []  # noqa: N815


class PreferredAllocationResponse(KubeletMessage, frozen=True, kw_only=True):
    container_responses: Annotated[list[ContainerPreferredAllocationResponse], 1] = []


class ContainerAllocateRequest(KubeletMessage, frozen=True, kw_only=True):
    devices_ids: Annotated[list[str], 1] = []


class AllocateRequest(KubeletMessage, frozen=True, kw_only=True):
    container_requests: Annotated[list[ContainerAllocateRequest], 1] = []


class Env(KubeletMessage, frozen=True, kw_only=True):
    """An entry of the map ``envs``: a map is written as a list of such messages."""

    key: Annotated[str, 1] = ""
    value: Annotated[str, 2] = ""


class CDIDevice(KubeletMessage, frozen=True, kw_only=True):
    """The full name of a CDI device: ``vendor/class=device``."""

    name: Annotated[str, 1] = ""


class ContainerAllocateResponse(KubeletMessage, frozen=True, kw_only=True):
    envs: Annotated[list[Env], 1] = []
    cdi_devices: Annotated[list[CDIDevice], 5] = []


class AllocateResponse(KubeletMessage, frozen=True, kw_only=True):
    container_responses: Annotated[list[ContainerAllocateResponse], 1] = []


class PreStartContainerRequest(KubeletMessage, frozen=True, kw_only=True):
    devices_ids: Annotated[list[str], 1] = []


class PreStartContainerResponse(KubeletMessage, frozen=True):
    pass


M = TypeVar("M", bound=KubeletMessage)

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {str: _Field.TYPE_STRING, bool: _Field.TYPE_BOOL, int: _Field.TYPE_INT32}


def encode(message: KubeletMessage) -> bytes:
    """Return ``message`` as protobuf writes it."""
    filled = _CLASSES[type(message)]()
    return json_format.ParseDict(msgspec.to_builtins(message), filled).SerializeToString()


def decoder(kind: type[M]) -> Callable[[bytes], M]:
    """Return a function that reads a message of this kind. It raises ``DecodeError`` of protobuf
    for bytes that are none."""

    def decode(data: bytes) -> M:
        read = _CLASSES[kind].FromString(data)
        fields = json_format.MessageToDict(read, preserving_proto_field_name=True)
        return msgspec.convert(fields, kind)

    return decode


def _classes() -> dict[type[KubeletMessage], type[ProtobufMessage]]:
    file = descriptor_pb2.FileDescriptorProto(
        name="kiwi/deviceplugin.proto", package=VERSION, syntax="proto3"
    )
    kinds = KubeletMessage.__subclasses__()
    for kind in kinds:
        _describe(kind, file.message_type.add(name=kind.__name__))
    # a separate pool: other packages may have the interface, too
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        kind: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{VERSION}.{kind.__name__}")
        )
        for kind in kinds
    }


def _describe(kind: type[KubeletMessage], message: descriptor_pb2.DescriptorProto) -> None:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        plain, number = get_args(hint)
        repeated = get_origin(plain) is list
        item = get_args(plain)[0] if repeated else plain
        field = message.field.add(name=name, number=number, json_name=name)
        field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
        field.type = _SCALARS.get(item, _Field.TYPE_MESSAGE)
        if field.type == _Field.TYPE_MESSAGE:
            field.type_name = f".{VERSION}.{item.__name__}"


_CLASSES: Final = _classes()
