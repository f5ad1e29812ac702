"""A second stream of a GPU, for copies between device and host memory beside the device's own work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ninfer._cuda import driver
from ninfer.contract import Buffer

if TYPE_CHECKING:
    from ninfer._cuda.device import CudaDevice


class CudaCopies:
    """Copies in the order they are submitted; ``follow`` puts them behind what the device's stream has by then."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._given = device.new_event()

    def follow(self) -> None:
        self._device.enter()
        driver.call("cuEventRecord", self._given, self._device.stream)
        driver.call("cuStreamWaitEvent", self._stream, self._given, 0)

    def upload(self, dst: Buffer, src: npt.NDArray[Any]) -> None:
        self._device.upload(dst, src, self._stream)

    def download(self, dst: npt.NDArray[Any], src: Buffer) -> None:
        self._device.download(dst, src, self._stream)

    def event(self) -> Any:
        return self._device.event(self._stream)
