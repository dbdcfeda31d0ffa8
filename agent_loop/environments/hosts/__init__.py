"""Environments outside the agent worker's process: in its host processes (`agent.environment_hosts`).

The worker enters `pool.HostedEnvironments`, which starts the hosts and gives each episode an environment in one of
them. What to prepare where, who gets it and which host to replace is decided by `plan.py`, which is pure; `link.py`
talks to a host, in the messages of `wire.py`, and `process.py` is the host, which makes and calls environments as a
worker without hosts would (`..local`). `session.py` is the worker's end of one environment. Hosts and whatever they
started end with the worker (`rl_async/process/guard.py`).
"""
