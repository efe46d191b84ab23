find stopped/version_0 -type f | sort
