"""The control plane: worker, request records, scheduler, resource manager."""
