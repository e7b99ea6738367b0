# The program runs behind this shell, which is told by a signal that the time is nearly up, and tells the program. (In
# front of it, the shell would deal with the signal only after the program has ended.)
told='' step='' clock=''
trap 'told=yes; echo "job {{job}}: the time is nearly up, $(date -Is)"
    [[ ! $step ]] || kill -{{signal}} "$step" || true' USR2 # the launcher hands it on to all ranks
# The ranks write into this file how the program ended, and rank 0 takes it away after a good end. A launcher's status
# does not say: one may return 0 where nothing was started, and the greatest status of all ranks hides the first.
unfinished={{unfinished}}
{ : >"$unfinished"; } 2>/dev/null || unfinished=
# Also when the job is cancelled; what is left after a SIGKILL, the next start of this job removes.
trap '[[ ! $clock ]] || kill "$clock" 2>/dev/null || true; [[ ! $unfinished ]] || rm -f -- "$unfinished"' EXIT
said=$(stat -Lc %s "/proc/$$/fd/2") # what stands in the output from here on is of this start
{{clock}}
"${launch[@]}" python3 -m mpistrategy run ${unfinished:+--unfinished "$unfinished"} "${program[@]}" &
step=$!
status=0
wait "$step" || status=$?
trap '' USR2
if [[ $told ]]; then # the signal cut that wait short; 127: it did not
    later=0
    wait "$step" 2>/dev/null || later=$?
    ((later == 127)) || status=$later
fi

# again: whether the program is to be started once more; why: the reason for it.
again=yes why="stopped with status $status"
if [[ ! $unfinished ]]; then
    [[ $status == 75 || $told ]] || again='' why="failed with status $status"
    ((status != 0)) || again='' why='is done'
elif [[ ! -e $unfinished ]]; then
    again='' why="failed with status $status"
    ((status != 0)) || why='is done'
elif failed=$(grep -m1 '^failed' "$unfinished"); then
    again='' why=$failed
elif ((status == 0)); then
    status=75 why='has not ended, whatever the launcher says'
elif grep -q '^begun' "$unfinished" && ! grep -q '^stopped' "$unfinished" && [[ -f /proc/$$/fd/2 ]]; then
    # No rank could say it. A rank that was killed by a signal of its own fault, or for its memory, does so each time;
    # anything else came from outside, as when a node is lost or a more urgent job needs the nodes. (Some MPIs crash
    # where a node is gone; so the nodes are asked. And once a rank has ended, srun itself kills those that are left.)
    fault='Out Of Memory|Segmentation fault|Aborted|Killed|Bus error|Illegal instruction|Floating point exception'
    fault="^srun: error: .*: tasks? [^ ]*: ($fault)|signal [0-9]+ \(($fault)\)|\(($fault)\) *\(signal [0-9]+\)"
    by_srun='/^srun: .*(Job step aborted|Terminating StepId)/,$ s/^(srun: error: .*): Killed$/\1/'
    if failed=$(grep -aEm1 "$fault" < <(tail -c "+$((said + 1))" "/proc/$$/fd/2" | sed -E "$by_srun")) &&
        {{all_nodes_answer}}; then
        again='' why="was ended: $failed"
    fi
fi
[[ ! $unfinished ]] || rm -f -- "$unfinished"
