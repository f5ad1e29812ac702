"""The `.ninfer` container, version 3: a directory in JSON over a payload of tensors and resources.

From bytes upwards: ``formats`` (what a code means), ``layouts`` (where codes and scales lie), ``encoding``
and ``decoding`` between numbers and stored bytes; ``directory`` (the values), ``jsontext`` and ``parsing``
(the checks), ``framing`` and ``source`` (files, mapped and opened lazily), ``artifact`` (parameters by name);
``planning`` and ``writer`` the other way; ``verification``, ``inspection`` and ``synthetic`` beside them.
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
from ninfer.artifact.inspection import Inspection, inspect
from ninfer.artifact.layouts import Geometry, Plane, geometry, plane_view, swizzle_scales, unswizzle_scales
from ninfer.artifact.planning import ResourceSpec, TensorSpec, pack_members, plan_directory
from ninfer.artifact.source import ArtifactFile, ArtifactSource, open_artifact
from ninfer.artifact.synthetic import RandomTensor, SyntheticSource
from ninfer.artifact.verification import Finding, verify
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
    "Finding",
    "Format",
    "Geometry",
    "Inspection",
    "Part",
    "Plane",
    "Proposal",
    "RandomTensor",
    "ResourceObject",
    "ResourceSpec",
    "SyntheticSource",
    "TensorObject",
    "TensorSpec",
    "Use",
    "decode",
    "decode_elements",
    "encode",
    "encode_rows",
    "format_of",
    "geometry",
    "inspect",
    "nvfp4_divisor",
    "open_artifact",
    "pack_members",
    "plan_directory",
    "plane_view",
    "swizzle_scales",
    "unswizzle_scales",
    "verify",
    "write_artifact",
]
