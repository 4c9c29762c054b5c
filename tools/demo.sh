#!/usr/bin/env bash
# The main job on the shipped model: install, convert the checkpoint, measure its perplexity, write a few sentences.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install_imp ""
out=${1:-build/prose.gguf}
mkdir -p "$(dirname "$out")"
imp convert --force models/prose-nvfp4 "$out"
imp-perplexity -m "$out" -f models/heldout_austen.txt -c 512 --chunks 40
imp run "$out" -p "It was a truth universally acknowledged, that" -n 80 --temp 0.8 --seed 7
