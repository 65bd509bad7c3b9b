"""The endpoint picker of a gateway such as Envoy, which sends the requests itself."""
