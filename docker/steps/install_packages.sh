#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# install_packages.sh PACKAGE...: Debian packages without what they merely recommend.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "$@"
# Lists of packages are of no use in an image.
rm -rf /var/lib/apt/lists/*
