"""The `.ninfer` container: directory, number formats, layouts, reader, writer."""
