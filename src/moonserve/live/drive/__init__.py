"""One request's calls to instances, as the Conductor decides: call, retry, resume and abort."""
