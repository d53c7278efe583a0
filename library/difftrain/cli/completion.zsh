# The end of what `difftrain completion zsh` prints; before it stand the functions with the words.
_difftrain() {
  local topic="" flag="" what=""
  local -a choices
  (( CURRENT > 2 )) && topic="${words[2]}"
  if (( CURRENT > 3 )) && [[ -n "$(_difftrain_flags "$topic ${words[3]}")$(_difftrain_words "$topic ${words[3]}")" ]]; then
    topic="$topic ${words[3]}"
  fi
  if [[ "$PREFIX" == --*=* ]]; then
    flag="${PREFIX%%=*}"
    compset -P 1 '*='
  elif [[ "${words[CURRENT-1]}" == --* && "$PREFIX" != -* ]]; then
    flag="${words[CURRENT-1]}"
  fi
  if [[ -n "$flag" ]]; then
    what="$(_difftrain_values "$topic $flag")"
    [[ "$what" == @switch ]] && flag=""
  fi
  if [[ "$what" == @number ]]; then
    return 1
  elif [[ -n "$flag" && -n "$what" ]]; then
    choices=(${=what})
    compadd -a choices
    return
  elif [[ -z "$flag" && "$PREFIX" == -* ]]; then
    choices=($(_difftrain_flags "$topic"))
    local -a valued=(${(M)choices:#*=}) switches=(${choices:#*=})
    compadd -S '' -a valued
    compadd -a switches
    return
  elif [[ -z "$flag" ]]; then
    choices=($(_difftrain_words "$topic"))
    compadd -a choices && return
    [[ -z "$topic" ]] && return 1
  fi
  _files
}
compdef _difftrain difftrain
