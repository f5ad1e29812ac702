"""Ops and Device on the host.

``device`` holds buffers and submits kernels; ``ops`` checks an Op's shapes and turns it into kernel launches;
``kernels`` is the native code, compiled by ``kernel`` and run by ``launch`` on the device's own ``threads``.
A matrix stays in its stored bytes (``matrix``) and is decoded in registers.

Every sum has one order, independent of how many columns, rows or threads take part, so results are bitwise equal for
any batch and any splitting of a prompt.
"""
