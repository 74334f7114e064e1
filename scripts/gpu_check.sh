#!/usr/bin/env bash
exec bash "$(dirname "$0")/../tools/gpu_check.sh" "$@"
