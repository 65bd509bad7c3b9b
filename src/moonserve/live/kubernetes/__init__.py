"""External engines that Kubernetes runs: found by the API server's lists and watches."""
