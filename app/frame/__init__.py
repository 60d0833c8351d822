"""The frame of every page: address, header, bar, users, uploads, and the server's guards."""
