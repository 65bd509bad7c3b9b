"""The registry over etcd: how processes and engines find each other, and the keys they use."""
