#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# add_user.sh NAME UID: the user that serves. Its home ($HOME) holds caches only. It is
# a real entry: torch asks for the user's name, and fails for a bare number.
set -euo pipefail

useradd --uid "$2" --no-create-home --home-dir "$HOME" --shell /usr/sbin/nologin "$1"
mkdir -p "$HOME/.cache"
chown -R "$1" "$HOME"
