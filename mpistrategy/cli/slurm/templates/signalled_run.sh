# The program runs behind this shell, which is told by a signal that the time is nearly up, and tells the program. (In
# front of it, the shell would deal with the signal only after the program has ended.)
told='' step=''
trap 'told=yes; echo "job $SLURM_JOB_ID: the time is nearly up, $(date -Is)"
    [[ ! $step ]] || kill -USR2 "$step" || true' USR2 # srun hands it on to all ranks
# Rank 0 takes this file away when the program has come to a good end: srun of Slurm 22.05 can return 0 where nothing
# was started, as after the loss of a node.
unfinished=.mpistrategy-$SLURM_JOB_ID.unfinished
{ : >"$unfinished"; } 2>/dev/null || unfinished=
trap 'rm -f -- "$unfinished"' EXIT # scancel as well; what is left after a SIGKILL, the next start of this job removes
"${launch[@]}" python3 -m mpistrategy run ${unfinished:+--unfinished "$unfinished"} "${program[@]}" &
step=$!
status=0
wait "$step" || status=$?
trap '' USR2
if [[ $told ]]; then # the signal cut that wait short; 127: it did not
    again=0
    wait "$step" 2>/dev/null || again=$?
    ((again == 127)) || status=$again
fi
if [[ $unfinished ]]; then
    if [[ $status == 0 && -e $unfinished ]]; then
        echo "job $SLURM_JOB_ID: status 0 from the launcher, but the program has not ended: that counts as status 75"
        status=75
    fi
    rm -f -- "$unfinished"
fi
