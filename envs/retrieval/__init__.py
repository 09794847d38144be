"""Finding passages: one Protocol, several indices, a client and the parts of a server."""
