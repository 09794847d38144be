"""Multi-hop question answering with a search tool."""
