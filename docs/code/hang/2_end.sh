grep "heartbeat: the run ends" run.log
