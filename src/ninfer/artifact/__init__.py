"""The `.ninfer` container, version 3: a directory in JSON over a payload of tensors and resources.

From bytes upwards: ``formats`` (what a code means), ``layouts`` (where codes and scales lie), ``encoding``
and ``decoding`` between numbers and stored bytes; ``directory`` (the values), ``jsontext`` and ``parsing``
(the checks), ``framing`` and ``source`` (files, mapped and opened lazily), ``artifact`` (parameters by name);
``planning`` and ``writer`` the other way.
"""

from ninfer.artifact.artifact import Artifact, EncodedTensor
from ninfer.artifact.decoding import decode, decode_elements
from ninfer.artifact.directory import (
    Binding,
    Component,
    Directory,
    FileEntry,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
)
from ninfer.artifact.encoding import encode, encode_rows, nvfp4_divisor
from ninfer.artifact.formats import FORMATS, Format, format_of
from ninfer.artifact.layouts import Geometry, Plane, geometry, plane_view, swizzle_scales, unswizzle_scales
from ninfer.artifact.planning import ResourceSpec, TensorSpec, pack_members, plan_directory
from ninfer.artifact.source import ArtifactFile, ArtifactSource, open_artifact
from ninfer.artifact.writer import ArtifactWriter, write_artifact

__all__ = [
    "FORMATS",
    "Artifact",
    "ArtifactFile",
    "ArtifactSource",
    "ArtifactWriter",
    "Binding",
    "Component",
    "Directory",
    "EncodedTensor",
    "FileEntry",
    "Format",
    "Geometry",
    "Part",
    "Plane",
    "Proposal",
    "ResourceObject",
    "ResourceSpec",
    "TensorObject",
    "TensorSpec",
    "Use",
    "decode",
    "decode_elements",
    "encode",
    "encode_rows",
    "format_of",
    "geometry",
    "nvfp4_divisor",
    "open_artifact",
    "pack_members",
    "plan_directory",
    "plane_view",
    "swizzle_scales",
    "unswizzle_scales",
    "write_artifact",
]
