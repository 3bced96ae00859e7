"""The sender daemon: prefills a prefix and hands its cache over."""
